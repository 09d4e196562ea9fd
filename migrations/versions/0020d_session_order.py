"""The order of console sessions that were created in the same second."""

import sqlalchemy as sa
from alembic import op

revision = "0020d"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "console_sessions", sa.Column("created_ns", sa.BigInteger(), nullable=False, server_default="0")
    )


def downgrade() -> None:
    op.drop_column("console_sessions", "created_ns")
