//! What operators see and change.

use std::time::Duration;

use bytes::Bytes;
use ibid::store::{Address, Counts, Cursor, End, Fence, Filter, Held, Operators, Page, State, StoreError, StoreFuture};
use tokio_postgres::types::{ToSql, Type};

use super::{
    Postgres,
    rows::{self, EndColumns, LISTED, as_text, column, micros},
    statements::Statement,
};

/// Listings and counts may have to look at many rows.
const PATIENCE: Duration = Duration::from_secs(10);
const FORGET: i16 = 4;
const REPLACE: i16 = 5;

impl Postgres {
    async fn change(&self, at: &Address, seen: Fence, end: EndColumns<'_>) -> Result<Held, StoreError> {
        let (address, seen) = (&at.0[..], rows::fence(seen));
        let params: [&(dyn ToSql + Sync); 11] = [
            &address,
            &seen,
            &end.how,
            &end.failed,
            &end.record,
            &end.status,
            &end.requested_ms,
            &end.completed_ms,
            &end.took,
            &end.keep,
            &end.retry,
        ];
        let found = self.pool.call(Statement::Change, &params, self.pool.deadline()).await?;
        self.only(&found, None)?.into_held()
    }

    async fn page(&self, filter: &Filter, from: Cursor, at_most: u32) -> Result<Page, StoreError> {
        let tags = [&filter.tenant, &filter.user, &filter.endpoint, &filter.key, &filter.key_hash];
        let tags = tags.map(|tag| tag.as_deref().map(as_text));
        let address = filter.address.as_ref().map(|at| &at.0[..]);
        let (from, age) = (from.0.as_ref().map(|at| at.0), filter.older_than.map(micros));
        let (from, limit) = (from.as_ref().map(|at| &at[..]), i64::from(at_most) + 1);
        let mut sql = format!(
            "SELECT {LISTED} FROM ibid.idempotency_keys k WHERE k.state <> 'free' AND k.expires_at > statement_timestamp()"
        );
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> = Vec::new();
        sql += match filter.state {
            None => "",
            Some(State::Processing) => " AND k.state = 'processing' AND k.lease_until > statement_timestamp()",
            Some(State::Unknown) => {
                " AND k.state IN ('processing', 'unknown') AND (k.state = 'unknown' OR k.lease_until <= statement_timestamp())"
            }
            Some(State::Done) => " AND k.state = 'done'",
            Some(State::Failed) => " AND k.state = 'failed'",
        };
        for (column, tag) in ["tenant", "user_id", "endpoint", "key", "key_hash"].into_iter().zip(&tags) {
            if let Some(tag) = tag {
                params.push((tag, Type::TEXT));
                sql += &format!(" AND k.{column} = ${}", params.len());
                // Lets the planner use the index, which leaves out what is empty.
                if !tag.is_empty() {
                    sql += &format!(" AND k.{column} <> ''");
                }
            }
        }
        if let Some(address) = &address {
            params.push((address, Type::BYTEA));
            sql += &format!(" AND k.address = ${}", params.len());
        }
        if let Some(from) = &from {
            params.push((from, Type::BYTEA));
            sql += &format!(" AND k.address > ${}", params.len());
        }
        if let Some(age) = &age {
            params.push((age, Type::INT8));
            sql += &format!(" AND k.claimed_at < ibid._after(statement_timestamp(), -${})", params.len());
        }
        params.push((&limit, Type::INT8));
        sql += &format!(" ORDER BY k.address LIMIT ${}", params.len());
        let found = self.pool.read(&sql, &params, PATIENCE).await?;
        let mut entries = found.iter().map(rows::listed).collect::<Result<Vec<_>, _>>()?;
        let more = entries.len() > at_most as usize;
        entries.truncate(at_most as usize);
        let next = if more { entries.last().map(|last| Cursor(Some(last.address))) } else { None };
        // Tags that text cannot hold look like others there: compare what they are.
        entries.retain(|entry| filter.matches(entry));
        Ok(Page { entries, next })
    }
}

impl Operators for Postgres {
    fn list<'a>(&'a self, filter: &'a Filter, from: Cursor, at_most: u32) -> StoreFuture<'a, Page> {
        StoreFuture::boxed(self.page(filter, from, at_most))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a End) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(self.change(at, seen, EndColumns::new(end)))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move {
            if let Some(copies) = &self.copies {
                copies.forget(at);
            }
            let forgotten = self.change(at, seen, EndColumns { how: FORGET, ..EndColumns::default() }).await;
            // Again: somebody may have read it in between.
            if let Some(copies) = &self.copies {
                copies.forget(at);
            }
            forgotten
        })
    }

    fn replace<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, Held> {
        StoreFuture::boxed(async move {
            let end = EndColumns { how: REPLACE, record: Some(&record), ..EndColumns::default() };
            self.change(at, seen, end).await
        })
    }

    fn counts(&self) -> StoreFuture<'_, Counts> {
        StoreFuture::boxed(async move {
            let sql = "SELECT c.processing, c.unknown, c.finished, c.bytes FROM ibid._counts() c";
            let found = self.pool.read(sql, &[], PATIENCE).await?;
            let row = self.first(&found)?;
            let number = |at| column::<i64>(row, at).map(|number| number.max(0) as u64);
            Ok(Counts { processing: number(0)?, unknown: number(1)?, finished: number(2)?, bytes: number(3)? })
        })
    }
}
