raise SystemExit("error: moved: python -m tools.convert, see docs/migration.md")
