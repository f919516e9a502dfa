# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from moe_lora.core.errors import ConfigError
from moe_lora.core.wrong_files import read_config


@pytest.mark.parametrize(("text", "message"), [(None, "does not exist"), ("{", "not valid JSON")])
def test_config_that_cannot_be_read_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)
