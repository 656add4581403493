"""Dates written in many ways, and the same dates as ISO 8601 writes them."""

from datetime import date, timedelta

from utils.probe import hashed

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
WEEKDAYS = (
    *("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
)
# Two digits of a year are enough: 50 to 99 mean 19.., 00 to 49 mean 20...
FIRST, LAST = date(1950, 1, 1), date(2049, 12, 31)
N_DAYS = (LAST - FIRST).days + 1
# Every eighth day, spread without a pattern, is kept for testing.
TEST_SHARE, TEST_SEED = 8, 13


def ordinal(n: int) -> str:
    """1st, 2nd, 3rd, 4th, …, 11th, 12th, 13th, …, 21st, …"""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{'th' if n % 100 in (11, 12, 13) else ending}"


# The parts of a date that each form uses. A point means day first, a slash month first.
FORMS = {
    "day month year": lambda d: f"{d.day} {MONTHS[d.month - 1]} {d.year}",
    "month day, year": lambda d: f"{MONTHS[d.month - 1]} {d.day}, {d.year}",
    "weekday": lambda d: (
        f"{WEEKDAYS[d.weekday()][:3]} {d.day} {MONTHS[d.month - 1][:3]} {d.year}"
    ),
    "ordinal of month": lambda d: f"{ordinal(d.day)} of {MONTHS[d.month - 1]} {d.year}",
    "short": lambda d: f"{MONTHS[d.month - 1][:3]} {ordinal(d.day)}, {d.year}",
    "short year": lambda d: f"{d.day} {MONTHS[d.month - 1][:3]} '{d.year % 100:02}",
    "points": lambda d: f"{d.day}.{d.month}.{d.year}",
    "points, padded": lambda d: f"{d.day:02}.{d.month:02}.{d.year}",
    "slashes": lambda d: f"{d.month}/{d.day}/{d.year}",
    "slashes, short": lambda d: f"{d.month:02}/{d.day:02}/{d.year % 100:02}",
}
LONGEST = max(
    len(write(date(2000, month, 23) + timedelta(days=i)))
    for write in FORMS.values()
    for month in range(1, 13)
    for i in range(7)
)


def written_dates(n: int, seed: int, test: bool = False) -> list[tuple[str, str]]:
    """`n` pairs of a date written in some form and in ISO 8601, "2021-03-05".

    seed: another seed, other dates and forms; the same ones on every machine.
    test: take the dates from the days kept for testing. No such day ever comes in a
        list for training, whatever the seeds.
    """
    kept = hashed(N_DAYS, TEST_SEED) % TEST_SHARE == 0
    days = (kept == test).nonzero().flatten()
    draws = hashed(2 * n, seed).reshape(n, 2)
    found = []
    for which, form in draws.tolist():
        day = FIRST + timedelta(days=int(days[which % len(days)]))
        text = list(FORMS.values())[form % len(FORMS)](day)
        found.append((text, day.isoformat()))
    return found
