raise SystemExit("error: moved: python -m tools.list_checkpoints, see docs/migration.md")
