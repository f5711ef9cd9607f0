"""Files written atomically, checksums, versions."""
