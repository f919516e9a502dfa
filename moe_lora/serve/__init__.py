# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible HTTP front end, without torch; engines are behind `EngineClient`."""
