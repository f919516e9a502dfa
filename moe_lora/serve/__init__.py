# SPDX-License-Identifier: Apache-2.0
"""The OpenAI-compatible HTTP front end.  Talks to engines through `EngineClient` only; imports no torch."""
