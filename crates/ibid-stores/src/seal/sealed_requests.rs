use std::{collections::HashMap, sync::Arc};

use ibid::store::{ClaimRequest, ClaimToken};
use parking_lot::Mutex;

const SHARD_COUNT: usize = 16;
/// Maximum number of requests per shard. Beyond it they are encrypted again.
const MAX_REQUESTS_PER_SHARD: usize = 4096;

/// The encrypted form of requests that were granted and not settled yet.
#[derive(Default)]
pub(super) struct SealedRequests([Mutex<HashMap<ClaimToken, SealedRequest>>; SHARD_COUNT]);

struct SealedRequest {
    plain: Arc<ClaimRequest>,
    sealed: Arc<ClaimRequest>,
}

impl SealedRequests {
    fn shard(&self, token: &ClaimToken) -> &Mutex<HashMap<ClaimToken, SealedRequest>> {
        &self.0[usize::from(token.0[0]) % SHARD_COUNT]
    }

    pub(super) fn insert(&self, plain: &Arc<ClaimRequest>, sealed: Arc<ClaimRequest>) {
        let mut shard = self.shard(&plain.token).lock();
        if shard.len() >= MAX_REQUESTS_PER_SHARD {
            shard.clear();
        }
        shard.insert(plain.token, SealedRequest { plain: plain.clone(), sealed });
    }

    /// Returns the encrypted form of exactly this request.
    pub(super) fn find(&self, plain: &Arc<ClaimRequest>) -> Option<Arc<ClaimRequest>> {
        let shard = self.shard(&plain.token).lock();
        let known = shard.get(&plain.token)?;
        (Arc::ptr_eq(&known.plain, plain) || known.plain == *plain).then(|| known.sealed.clone())
    }

    pub(super) fn remove(&self, token: &ClaimToken) {
        self.shard(token).lock().remove(token);
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ibid::store::{Address, Fingerprint, Tags};

    use super::*;

    #[test]
    fn only_the_same_request_is_found_and_their_number_is_bounded() {
        let request = |label: &'static str| {
            Arc::new(ClaimRequest {
                address: Address([1; 32]),
                token: ClaimToken([2; 16]),
                fingerprint: Fingerprint::NONE,
                tags: Tags::default(),
                label: Bytes::from_static(label.as_bytes()),
                lease: std::time::Duration::ZERO,
                ttl: std::time::Duration::ZERO,
                take_over: None,
            })
        };
        let (all, plain) = (SealedRequests::default(), request("a"));
        all.insert(&plain, request("sealed"));
        assert_eq!(all.find(&request("a")).unwrap().label, "sealed", "an equal request");
        assert!(all.find(&request("b")).is_none(), "another request with this token");
        all.remove(&plain.token);
        assert!(all.find(&plain).is_none());
        for _ in 0..2 * MAX_REQUESTS_PER_SHARD {
            let mut other = (*plain).clone();
            other.token = ClaimToken::mint();
            other.token.0[0] = 0;
            all.insert(&Arc::new(other), plain.clone());
        }
        assert!(all.0[0].lock().len() <= MAX_REQUESTS_PER_SHARD);
    }
}
