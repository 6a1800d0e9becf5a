"""Helpers, stand-ins and makers that tests share."""
