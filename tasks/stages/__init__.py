"""Entry points of the DVC stages, one file each. Importing this package makes libraries quiet."""

from tasks.runner import process as process
