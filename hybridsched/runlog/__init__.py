"""What happened in a run: events and metrics, from whoever reports them to HDF5 files and back.

base.py is the contract for reporters. writer.py (with series, wal, rows, netcdf, naming) keeps it; reader.py reads a
live, killed or finished run; sinks.py combines and mirrors. Nothing heavy is imported here.
"""
