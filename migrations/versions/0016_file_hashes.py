"""Files are found by their content, which those of a project share."""

from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_files_project_id_sha256", "files", ["project_id", "sha256"])


def downgrade() -> None:
    op.drop_index("ix_files_project_id_sha256", "files")
