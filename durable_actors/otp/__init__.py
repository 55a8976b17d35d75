"""OTP-style actors and supervisors on Trio; no database."""
