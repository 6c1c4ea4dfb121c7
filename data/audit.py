raise SystemExit("error: moved: python -m tools.audit, see docs/migration.md")
