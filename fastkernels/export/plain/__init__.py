"""Short versions of core modules, read as text by the exporter and never imported: an exported file contains them."""
