"""Data: text → tokenised Arrow shards → batches whose order is a pure function of one integer."""
