"""What a user can mend: one sentence, exit code 2."""


class ConfigError(ValueError):
    """A setting that cannot work: one sentence that names the field, the value and the remedy."""
