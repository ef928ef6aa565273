DROP POLICY admins_view_all_idempotency_keys ON ibid.idempotency_keys;
DROP POLICY service_role_insert_idempotency_keys ON ibid.idempotency_keys;
DROP POLICY users_own_idempotency_keys ON ibid.idempotency_keys;
ALTER TABLE ibid.idempotency_keys NO FORCE ROW LEVEL SECURITY;
ALTER TABLE ibid.idempotency_keys DISABLE ROW LEVEL SECURITY;
