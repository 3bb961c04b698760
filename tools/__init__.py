"""What writes documents and data of this checkout; in no wheel, and nothing that runs needs it."""
