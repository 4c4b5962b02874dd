"""The core of Breadcrumb: one room per concern, imports point one way (see CONTRIBUTING.md)."""

import os

from tasks import loopback, own
from tasks.writable import use_caches

use_caches(os.environ)  # Here, because libraries read these variables when they are imported.
loopback.spare()  # Before any client is made.
own.install()
