from tests.families.table import in_docs, table


def test_the_page_says_of_each_family_what_the_checks_at_load_say(load):
    """If it differs, `python -m tests.families.table` writes the table anew."""
    assert in_docs() == table(lambda family: load(family)[1])
