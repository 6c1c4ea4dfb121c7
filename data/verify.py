raise SystemExit("error: moved: python -m tools.verify, see docs/migration.md")
