"""Runtime of packages for several ranks that families share, which is emitted unchanged."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""The folder of these files."""
SHARED = ("agreement.py", "groups.py")
"""The files."""
