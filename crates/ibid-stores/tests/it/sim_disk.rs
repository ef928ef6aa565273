//! A disk that remembers everything that was done to it, so that it can lose power at any point of that.
//!
//! An [image](SimDisk::image) is what a machine could find after its power went between two operations: what was synced
//! is there; of what was not, each write may be there, not there, or in part (by sectors), in any order; names changed
//! since the last sync of the directory may have changed or not, in their order. A sync that failed drops what it should
//! have written, or not, for good.

use std::{
    collections::{BTreeMap, HashSet},
    fmt, io,
    sync::Arc,
};

use ibid_stores::embedded::{Disk, DiskFile};
use parking_lot::Mutex;

const SECTOR: usize = 512;

#[derive(Debug, Clone)]
enum DiskEvent {
    Create { inode: usize, name: String },
    Rename { from: String, to: String },
    Remove { name: String },
    SyncDir,
    Write { inode: usize, at: usize, bytes: Arc<[u8]> },
    Resize { inode: usize, to: usize },
    Sync { inode: usize },
    SyncFailed { inode: usize },
}

#[derive(Debug, Default)]
struct SimDiskState {
    names: BTreeMap<String, usize>,
    files: Vec<Vec<u8>>,
    events: Vec<DiskEvent>,
    syncs: usize,
    faults: SimDiskFaults,
}

/// What goes wrong from now on.
#[derive(Debug, Clone, Default)]
pub(crate) struct SimDiskFaults {
    /// These syncs fail, counted from the first ever.
    pub(crate) syncs: HashSet<usize>,
    /// No file may make the disk larger than this.
    pub(crate) capacity: Option<usize>,
    /// Every write fails.
    pub(crate) read_only: bool,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct SimDisk(Arc<Mutex<SimDiskState>>);

#[derive(Debug)]
struct SimFile {
    disk: SimDisk,
    inode: usize,
}

impl SimDisk {
    /// How many operations there were so far.
    pub(crate) fn position(&self) -> usize {
        self.0.lock().events.len()
    }

    pub(crate) fn syncs(&self) -> usize {
        self.0.lock().syncs
    }

    pub(crate) fn set_faults(&self, faults: SimDiskFaults) {
        self.0.lock().faults = faults;
    }

    /// What a machine could find that lost its power after so many operations. The seed chooses among the possible.
    pub(crate) fn image(&self, position: usize, seed: u64) -> SimDisk {
        let inner = self.0.lock();
        let mut crash = PowerLoss { dice: DiskRandom(seed), seed, ..PowerLoss::default() };
        for event in &inner.events[..position] {
            crash.replay_event(event);
        }
        crash.lose_power()
    }

    /// The same disk, whole, with its history forgotten.
    pub(crate) fn copy(&self) -> SimDisk {
        let inner = self.0.lock();
        let fresh = SimDiskState { names: inner.names.clone(), files: inner.files.clone(), ..SimDiskState::default() };
        SimDisk(Arc::new(Mutex::new(fresh)))
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.0.lock().names.keys().cloned().collect()
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        let inner = self.0.lock();
        inner.files[inner.names[name]].clone()
    }

    /// Bit rot.
    pub(crate) fn flip(&self, name: &str, at: usize) {
        let mut inner = self.0.lock();
        let inode = inner.names[name];
        inner.files[inode][at] ^= 0x20;
    }

    /// Damage of any kind, to any file.
    pub(crate) fn damage(&self, dice: &mut DiskRandom) {
        let mut inner = self.0.lock();
        let inodes: Vec<usize> = inner.names.values().copied().collect();
        let (inode, other) = (inodes[dice.below(inodes.len())], inodes[dice.below(inodes.len())]);
        let sector = |file: &[u8], dice: &mut DiskRandom| dice.below(file.len() / SECTOR + 1) * SECTOR;
        let from = sector(&inner.files[other], dice);
        let copied: Vec<u8> = inner.files[other][from..].iter().copied().take(SECTOR).collect();
        let file = &mut inner.files[inode];
        let at = sector(file, dice);
        match dice.below(5) {
            0 => file.truncate(dice.below(file.len() + 1)),
            1 => file[at..].iter_mut().take(SECTOR).for_each(|byte| *byte = 0),
            2 => write(file, at, &copied),
            _ if file.is_empty() => {}
            _ => {
                let at = dice.below(file.len());
                file[at] = dice.below(256) as u8;
            }
        }
    }

    fn file(&self, inode: usize) -> Arc<dyn DiskFile> {
        Arc::new(SimFile { disk: self.clone(), inode })
    }
}

impl SimDiskState {
    fn check_writable(&self, grown: usize) -> io::Result<()> {
        if self.faults.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        let live: HashSet<usize> = self.names.values().copied().collect();
        let taken: usize = live.iter().map(|inode| self.files[*inode].len()).sum();
        match self.faults.capacity {
            Some(capacity) if grown > 0 && taken + grown > capacity => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }
}

impl Disk for SimDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.names())
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut inner = self.0.lock();
        inner.check_writable(0)?;
        if inner.names.contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = inner.files.len();
        inner.files.push(Vec::new());
        inner.names.insert(name.into(), inode);
        inner.events.push(DiskEvent::Create { inode, name: name.into() });
        Ok(self.file(inode))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        self.0.lock().names.get(name).map(|inode| self.file(*inode)).ok_or(io::ErrorKind::NotFound.into())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut inner = self.0.lock();
        inner.check_writable(0)?;
        let inode = inner.names.remove(from).ok_or(io::ErrorKind::NotFound)?;
        inner.names.insert(to.into(), inode);
        inner.events.push(DiskEvent::Rename { from: from.into(), to: to.into() });
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut inner = self.0.lock();
        inner.check_writable(0)?;
        inner.names.remove(name).ok_or(io::ErrorKind::NotFound)?;
        inner.events.push(DiskEvent::Remove { name: name.into() });
        Ok(())
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.0.lock().events.push(DiskEvent::SyncDir);
        Ok(())
    }

    fn lock(&self) -> io::Result<Box<dyn fmt::Debug + Send + Sync>> {
        Ok(Box::new(()))
    }
}

impl DiskFile for SimFile {
    fn length(&self) -> io::Result<u64> {
        Ok(self.disk.0.lock().files[self.inode].len() as u64)
    }

    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let inner = self.disk.0.lock();
        let from = inner.files[self.inode].get(at as usize..).and_then(|tail| tail.get(..into.len()));
        into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    /// Every second sector counts as cached, so that both ways to read are used.
    fn read_cached_at(&self, into: &mut [u8], at: u64) -> io::Result<bool> {
        let is_cached = (at as usize / SECTOR).is_multiple_of(2);
        if is_cached { self.read_at(into, at).map(|()| true) } else { Ok(false) }
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        let at = at as usize;
        let grown = (at + bytes.len()).saturating_sub(inner.files[self.inode].len());
        inner.check_writable(grown)?;
        write(&mut inner.files[self.inode], at, bytes);
        inner.events.push(DiskEvent::Write { inode: self.inode, at, bytes: bytes.into() });
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        inner.syncs += 1;
        if inner.faults.syncs.contains(&inner.syncs) {
            inner.events.push(DiskEvent::SyncFailed { inode: self.inode });
            return Err(io::Error::other("the sync failed, as told"));
        }
        inner.events.push(DiskEvent::Sync { inode: self.inode });
        Ok(())
    }

    fn allocate(&self, length: u64) -> io::Result<()> {
        let mut inner = self.disk.0.lock();
        let to = length as usize;
        let grown = to.saturating_sub(inner.files[self.inode].len());
        inner.check_writable(grown)?;
        inner.files[self.inode].resize(to, 0);
        inner.events.push(DiskEvent::Resize { inode: self.inode, to });
        Ok(())
    }
}

fn write(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    if file.len() < at + bytes.len() {
        file.resize(at + bytes.len(), 0);
    }
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

/// A disk on its way to losing power.
#[derive(Default)]
struct PowerLoss {
    names: BTreeMap<String, usize>,
    unsynced_names: Vec<DiskEvent>,
    files: Vec<(Vec<u8>, Vec<DiskEvent>)>,
    dice: DiskRandom,
    seed: u64,
}

impl PowerLoss {
    fn replay_event(&mut self, event: &DiskEvent) {
        match event {
            DiskEvent::Create { inode, .. } => {
                self.files.resize_with(self.files.len().max(inode + 1), Default::default);
                self.unsynced_names.push(event.clone());
            }
            DiskEvent::Rename { .. } | DiskEvent::Remove { .. } => self.unsynced_names.push(event.clone()),
            DiskEvent::SyncDir => {
                for event in std::mem::take(&mut self.unsynced_names) {
                    self.apply_name_event(event);
                }
            }
            DiskEvent::Write { inode, .. } | DiskEvent::Resize { inode, .. } => {
                self.files[*inode].1.push(event.clone())
            }
            DiskEvent::Sync { inode } => {
                let (file, unsynced) = &mut self.files[*inode];
                unsynced.drain(..).for_each(|event| apply(file, &event));
            }
            DiskEvent::SyncFailed { inode } => self.lose_unsynced(*inode),
        }
    }

    fn lose_power(mut self) -> SimDisk {
        let survive = match self.seed {
            0 => 0,
            1 => self.unsynced_names.len(),
            _ => self.dice.below(self.unsynced_names.len() + 1),
        };
        for event in std::mem::take(&mut self.unsynced_names).into_iter().take(survive) {
            self.apply_name_event(event);
        }
        for inode in 0..self.files.len() {
            self.lose_unsynced(inode);
        }
        let files = self.files.into_iter().map(|(file, _)| file).collect();
        SimDisk(Arc::new(Mutex::new(SimDiskState { names: self.names, files, ..SimDiskState::default() })))
    }

    fn apply_name_event(&mut self, event: DiskEvent) {
        match event {
            DiskEvent::Create { inode, name } => drop(self.names.insert(name, inode)),
            DiskEvent::Rename { from, to } => {
                let inode = self.names.remove(&from).expect("names change in their order");
                self.names.insert(to, inode);
            }
            DiskEvent::Remove { name } => drop(self.names.remove(&name)),
            _ => unreachable!("no other event is about names"),
        }
    }

    /// Decides which of the unsynced writes of a file reach the disk.
    fn lose_unsynced(&mut self, inode: usize) {
        let (file, unsynced) = &mut self.files[inode];
        for event in unsynced.drain(..) {
            match (self.seed, self.dice.below(4)) {
                (0, _) => {}
                (1, _) | (_, 0) => apply(file, &event),
                (_, 1) => {}
                _ => apply_torn(file, &event, &mut self.dice),
            }
        }
    }
}

fn apply(file: &mut Vec<u8>, event: &DiskEvent) {
    match event {
        DiskEvent::Write { at, bytes, .. } => write(file, *at, bytes),
        DiskEvent::Resize { to, .. } => file.resize(*to, 0),
        _ => unreachable!("no other event changes a file"),
    }
}

fn apply_torn(file: &mut Vec<u8>, event: &DiskEvent, dice: &mut DiskRandom) {
    let DiskEvent::Write { at, bytes, .. } = event else { return apply(file, event) };
    for (nth, sector) in bytes.chunks(SECTOR).enumerate() {
        if dice.below(2) == 0 {
            write(file, at + nth * SECTOR, sector);
        }
    }
}

/// splitmix64: small, seeded, good enough to choose victims.
#[derive(Debug, Default)]
pub(crate) struct DiskRandom(pub(crate) u64);

impl DiskRandom {
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 16) as usize % limit
    }
}
