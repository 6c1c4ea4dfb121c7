raise SystemExit("error: moved: python -m tools.hf, see docs/migration.md")
