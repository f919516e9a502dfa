# SPDX-License-Identifier: Apache-2.0
"""What the HTTP front end costs."""
