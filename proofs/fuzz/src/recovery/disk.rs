//! A directory in memory.

use std::{collections::BTreeMap, fmt, io, sync::Arc};

use ibid_stores::embedded::{Disk, DiskFile};
use parking_lot::Mutex;

/// Names and contents.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

type Shared = Arc<Mutex<Vec<u8>>>;

#[derive(Debug, Clone, Default)]
pub(super) struct MemDisk(Arc<Mutex<BTreeMap<String, Shared>>>);

#[derive(Debug)]
struct MemFile(Shared);

impl MemDisk {
    pub(super) fn new(files: Files) -> Self {
        let files = files.into_iter().map(|(name, bytes)| (name, Arc::new(Mutex::new(bytes)))).collect();
        Self(Arc::new(Mutex::new(files)))
    }

    pub(super) fn files(&self) -> Files {
        self.0.lock().iter().map(|(name, bytes)| (name.clone(), bytes.lock().clone())).collect()
    }
}

fn none() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Disk for MemDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().keys().cloned().collect())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let file = Shared::default();
        match self.0.lock().insert(name.into(), file.clone()) {
            None => Ok(Arc::new(MemFile(file))),
            Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
        }
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(MemFile(self.0.lock().get(name).ok_or_else(none)?.clone())))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut files = self.0.lock();
        let file = files.remove(from).ok_or_else(none)?;
        files.insert(to.into(), file);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.lock().remove(name).map(drop).ok_or_else(none)
    }

    fn sync_dir(&self) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>> {
        Ok(Box::new(()))
    }
}

impl DiskFile for MemFile {
    fn length(&self) -> io::Result<u64> {
        Ok(self.0.lock().len() as u64)
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let bytes = self.0.lock();
        let range = usize::try_from(at).ok().and_then(|at| bytes.get(at..at.checked_add(into.len())?));
        into.copy_from_slice(range.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn read_cached_at(&self, into: &mut [u8], at: u64) -> io::Result<bool> {
        self.read_at(into, at).map(|()| true)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let end = at.checked_add(bytes.len() as u64).filter(|end| *end <= 64 << 20);
        let end = end.ok_or_else(|| io::Error::from(io::ErrorKind::StorageFull))? as usize;
        let mut file = self.0.lock();
        let length = file.len().max(end);
        file.resize(length, 0);
        file[at as usize..end].copy_from_slice(bytes);
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        if length > 64 << 20 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.0.lock().resize(length as usize, 0);
        Ok(())
    }
}
