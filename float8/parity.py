raise SystemExit("error: moved: python -m tools.parity, see docs/migration.md")
