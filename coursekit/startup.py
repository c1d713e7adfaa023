"""Imported before nbformat wherever a process of ours starts: saves it 1.5 s of CPU.

nbformat imports jsonschema, which imports a checker of URIs where one is installed (JupyterLab brings it), which then
compiles its grammar. No notebook has a URI to check. jsonschema takes an ImportError here for "not installed".
"""

import sys
from typing import Any, cast

cast(dict[str, Any], sys.modules).setdefault("rfc3987_syntax", None)
