"""Lesson 08: mistakes in the decoder, in sampling, and in counting."""
