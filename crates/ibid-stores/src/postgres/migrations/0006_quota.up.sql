-- What tenants have used in their present window, by the hash of their name. Rows of past windows are removed as others
-- are written.
CREATE TABLE ibid.quota (
    tenant    bytea       PRIMARY KEY CHECK (length(tenant) = 32),
    used      bigint      NOT NULL,
    resets_at timestamptz NOT NULL
);
CREATE INDEX quota_resets_at ON ibid.quota (resets_at);
REVOKE ALL ON ibid.quota FROM PUBLIC;
