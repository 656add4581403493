"""The mistakes that each exercise can name, one module per lesson.

Only these modules know the reference answers: a mistake is an edit of one.
"""
