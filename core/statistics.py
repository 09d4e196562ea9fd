"""Quantiles. scipy is imported when one is asked for: it takes 0.1 s, and the API imports this module at its start."""


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: half of a 95 % interval, in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
