raise SystemExit("error: moved: python -m tools.plan, see docs/migration.md")
