"""Draft models of speculative decoding: their passes, trees and costs."""
