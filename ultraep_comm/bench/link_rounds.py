"""Which links are timed at the same time."""

from __future__ import annotations

from collections.abc import Sequence

Link = tuple[int, int]  # from a rank to another


def make_rounds(domains: Sequence[int], *, one_at_a_time: bool = False) -> list[list[Link]]:
    """Return every link inside a domain once, in rounds.

    No two links of a round share a rank: a round-robin tournament of the ranks, each pairing once
    in each direction. In a round rank 0 of G (one more where G is odd, who stays away) meets one
    of the others, who sit in a circle, and whoever sits at equal distances from that one meet.

    Args:
        domains: ``[G]``, equal for ranks that reach each other.
        one_at_a_time: a round for each link.
    """
    num_ranks = len(domains)
    size = num_ranks + num_ranks % 2
    circle = size - 1
    rounds = []
    for turn in range(circle):
        pairs = [(0, 1 + turn)]
        for k in range(1, size // 2):
            pairs.append((1 + (turn + k) % circle, 1 + (turn - k) % circle))
        played = [(a, b) for a, b in pairs if max(a, b) < num_ranks and domains[a] == domains[b]]
        rounds += [played, [(b, a) for a, b in played]]
    if one_at_a_time:
        return [[link] for link in sorted(link for links in rounds for link in links)]
    return [links for links in rounds if links]
