"""Builds the CPU kernels while kv8 is installed, if a C++ compiler is there.

Without one the package is complete but for the kernels: kv8 then runs on its reference backend,
and says so with the reason left in not_built.txt. KV8_REQUIRE_KERNELS=1 makes that an error.
"""

import importlib.util
import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface[Any]):
    """See the module."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the library beside the module that loads it, in wheels and editable installs."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("kv8_build", root / "csrc" / "build.py")
        assert spec is not None
        assert spec.loader is not None
        builder = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(builder)
        library = root / "src" / "kv8" / "kernels" / "libkv8_cpu.so"
        reason = library.with_name("not_built.txt")
        reason.unlink(missing_ok=True)
        library.unlink(missing_ok=True)
        try:
            builder.build(library)
        except builder.BuildError as error:
            if os.environ.get("KV8_REQUIRE_KERNELS"):
                raise
            reason.write_text(f"{error}\n")
            self.app.display_warning(f"kv8 is installed without CPU kernels: {error}")
            return
        # The library has a C interface: any Python 3 on this kind of machine can use it.
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag}"
