# SPDX-License-Identifier: Apache-2.0
"""/v1/responses: OpenAI's Responses over chats."""
