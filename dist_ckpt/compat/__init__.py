"""Every private upstream API that the package touches, a file a library, so that an upgrade is read in one place."""
