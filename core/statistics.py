"""Quantiles. scipy is imported on use: it takes 0.1 s, and the API imports this module at startup."""


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: half of a 95 % interval, in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))
