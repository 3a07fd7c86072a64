"""Who owns which bytes on a rank."""
