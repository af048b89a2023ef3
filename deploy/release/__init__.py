"""Builds what is installed from: one file per architecture, a wheel, their checksums and what is in them."""
