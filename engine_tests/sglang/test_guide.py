"""The guide's launch line, by SGLang's own parser and kvferry's own settings."""

import argparse
import importlib
import re
import shlex
from pathlib import Path

from sglang.srt.mem_cache.unified_cache.linker_config import UnifiedCacheLinkerConfig
from sglang.srt.server_args import ServerArgs

from kvferry.linker.sglang_settings import SETTINGS, read_settings

GUIDE = Path(__file__).parents[2] / "docs" / "sglang.md"


def launch_line() -> list[str]:
    """The arguments of the guide's launch line."""
    text = GUIDE.read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(python -m sglang\.launch_server.*?)```", text, re.DOTALL)
    return shlex.split(block.replace("\\\n", " "))[3:]


def test_the_launch_line() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(launch_line())
    assert parsed.enable_unified_cache_external_linker
    assert parsed.unified_cache_external_linker_backend == "dynamic"
    config = UnifiedCacheLinkerConfig.from_dict(parsed.unified_cache_external_linker_config)
    module = importlib.import_module(config.linker_module_path)
    assert getattr(module, config.linker).__name__ == "KVFerryLinker"
    read = read_settings(
        config.linker_extra_config,
        environment={"MOONCAKE_MASTER": "m:1", "MOONCAKE_PROTOCOL": "tcp"},
    )
    assert (read.linker.namespace, read.adapter.staging_bytes) == ("prod", 512 << 20)


def test_every_setting_is_in_the_guide() -> None:
    told = set(re.findall(r"`([a-z_]+)`", GUIDE.read_text(encoding="utf-8")))
    assert not set(SETTINGS) - told
