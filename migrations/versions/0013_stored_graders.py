"""Named graders with versions and golden cases."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

SEQ = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "stored_graders",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("project_id", sa.String(64), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("updated_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_stored_graders_project_id"),
        sa.PrimaryKeyConstraint("seq", name="pk_stored_graders"),
        sa.UniqueConstraint("id", name="uq_stored_graders_id"),
        sa.UniqueConstraint("project_id", "name", name="uq_stored_graders_project_id_name"),
    )
    op.create_index("ix_stored_graders_project_id_seq", "stored_graders", ["project_id", "seq"])
    op.create_table(
        "grader_versions",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("grader_id", sa.String(64), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("note", sa.String(1024), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_grader_versions"),
        sa.UniqueConstraint("grader_id", "version", name="uq_grader_versions_grader_id_version"),
    )
    op.create_index("ix_grader_versions_grader_id_seq", "grader_versions", ["grader_id", "seq"])
    op.create_table(
        "golden_cases",
        sa.Column("seq", SEQ, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("grader_id", sa.String(64), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("sample", sa.JSON(), nullable=False),
        sa.Column("item", sa.JSON(), nullable=False),
        sa.Column("min_score", sa.Double()),
        sa.Column("max_score", sa.Double()),
        sa.Column("note", sa.String(1024), nullable=False),
        sa.Column("rollout_id", sa.String(128)),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_golden_cases"),
        sa.UniqueConstraint("id", name="uq_golden_cases_id"),
        sa.UniqueConstraint("grader_id", "sha256", name="uq_golden_cases_grader_id_sha256"),
    )
    op.create_index("ix_golden_cases_grader_id_seq", "golden_cases", ["grader_id", "seq"])


def downgrade() -> None:
    op.drop_table("golden_cases")
    op.drop_table("grader_versions")
    op.drop_table("stored_graders")
