"""Specs, trees and stand-ins for them."""
