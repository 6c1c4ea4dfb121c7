"""Turn text, or tokens of another project, into a dataset that training reads.

    python -m data.prepare --source stdlib --output datasets/stdlib

The way of a document: files are found (sources), cut into units (readers), each unit's documents tokenised into parts,
which are sorted by bucket (passes), and each bucket shuffled and written as a shard (passes, writer). Both passes run
on all cores, or with --cluster on a Dask cluster (workers). A hash of a document's position in the input decides its
bucket and place, a hash of its whole text whether it is held out. So the output does not depend on the processes.
Finished work stays in OUTPUT/.parts: after a kill, the same command goes on. manifest.json is written last.
"""

from data.prepare.command import main, prepare, prepare_sources

__all__ = ("main", "prepare", "prepare_sources")
