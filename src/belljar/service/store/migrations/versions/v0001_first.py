"""The first tables: runs with what they printed, measured and raised; claims, keys, images; the outbox."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _runs()
    _streams()
    _books()
    _outbox()


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("caller", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("language", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("session", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("started", sa.Double(), nullable=True),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("status", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("runs_by_age", "runs", ["created", "id"], unique=False)
    op.create_index("runs_by_caller", "runs", ["caller", "created"], unique=False)
    op.create_index("runs_by_fingerprint", "runs", ["fingerprint", "ended"], unique=False)
    op.create_index("runs_by_state", "runs", ["state", "created"], unique=False)


def _streams() -> None:
    op.create_table(
        "alerts",
        sa.Column("container_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("over", sa.Boolean(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("container_id", "at", "kind", "over"),
    )
    op.create_index("alerts_by_age", "alerts", ["at"], unique=False)
    op.create_table(
        "logs",
        sa.Column("container_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("timestamp", sa.Double(), nullable=False),
        sa.Column("stream", sa.Text(), nullable=False),
        sa.Column("message", sa.LargeBinary(), nullable=False),
        sa.Column("partial", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("container_id", "number"),
    )
    op.create_table(
        "samples",
        sa.Column("container_id", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("cpu_percent", sa.Double(), nullable=False),
        sa.Column("memory_mb", sa.Double(), nullable=False),
        sa.Column("network_rx_bytes", sa.BigInteger(), nullable=True),
        sa.Column("network_tx_bytes", sa.BigInteger(), nullable=True),
        sa.Column("disk_read_bytes", sa.BigInteger(), nullable=True),
        sa.Column("disk_write_bytes", sa.BigInteger(), nullable=True),
        sa.Column("uptime_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("container_id", "at"),
    )


def _books() -> None:
    op.create_table(
        "claims",
        sa.Column("caller", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("caller", "key"),
    )
    op.create_table(
        "images",
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("facts", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("engine", "reference", "digest"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("rate", sa.Text(), nullable=False),
        sa.Column("concurrency", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )


def _outbox() -> None:
    op.create_table(
        "arrivals",
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("origin"),
    )
    op.create_table(
        "notes",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "outbox",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
        sqlite_autoincrement=True,
    )
    op.create_index("outbox_by_run", "outbox", ["id"], unique=False)


def downgrade() -> None:
    for name in ("arrivals", "outbox", "notes", "images", "keys", "claims", "alerts", "samples", "logs", "runs"):
        op.drop_table(name)
