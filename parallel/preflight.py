raise SystemExit("error: moved: python -m tools.preflight, see docs/migration.md")
