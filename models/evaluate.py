raise SystemExit("error: moved: python -m tools.evaluate, see docs/migration.md")
