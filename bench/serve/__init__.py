"""What the HTTP front end costs."""
