raise SystemExit("error: moved: python -m tools.verify --list, see docs/migration.md")
