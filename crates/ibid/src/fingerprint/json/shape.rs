//! Shapes: the names of objects that were read before.
//!
//! The objects of an array mostly have the same names in the same order, and so do the requests of one client. An object
//! of a known shape is read by comparing each name as a whole, and the order of its members is known.
//!
//! Example: `{"sku":"a","price":1}` has the shape `{"sku":_,"price":_}`, whose sorted order is `price`, `sku`.

use super::{
    output::TextRange,
    sort::{self, JsonMember, MAX_FEW},
    token::{ChunkedText, digits, equal_bytes, literal, plain_end},
};

/// The maximum number of shapes that are learned from one document, so that documents without repetition stay cheap.
const MAX_LEARNED: usize = 8;
/// Objects from this depth on share their shapes with those of a lower depth.
const SHAPE_DEPTHS: usize = 8;

/// A name, with the byte before it and the colon after it.
#[derive(Clone, Copy)]
struct ShapeName {
    text: [u8; 16],
    /// The bytes that do not belong to it, one bit for each.
    others: u32,
    size: u32,
}

/// The names of an object of scalars, in the order of the source, without any space.
#[derive(Clone, Copy)]
struct ObjectShape {
    names: [ShapeName; MAX_FEW],
    /// The index of each member, in canonical order.
    sorted: [u32; MAX_FEW],
    len: usize,
    is_sorted: bool,
}

/// The shape of the last object of scalars of each depth.
pub(super) struct ObjectShapes {
    shapes: [ObjectShape; SHAPE_DEPTHS],
    learned: usize,
}

impl ObjectShapes {
    pub(super) const fn new() -> Self {
        let name = ShapeName { text: [0; 16], others: 0, size: 0 };
        let none = ObjectShape { names: [name; MAX_FEW], sorted: [0; MAX_FEW], len: 0, is_sorted: true };
        Self { shapes: [none; SHAPE_DEPTHS], learned: 0 }
    }

    /// Starts with another document.
    pub(super) fn start_document(&mut self) {
        self.learned = 0;
    }

    /// Reads the object at a position, if it has the shape of the last one of this depth. Returns its end, and the index of
    /// each member in canonical order if they are not in order. Stores where the members are, relative to its start.
    #[inline(always)]
    pub(super) fn read(
        &self, source: ChunkedText<'_>, pos: u32, depth: usize, members: &mut [TextRange; MAX_FEW],
    ) -> Option<(u32, &[u32])> {
        let shape = &self.shapes[depth % SHAPE_DEPTHS];
        let mut end = pos;
        for (name, member) in shape.names[..shape.len].iter().zip(members) {
            if equal_bytes(source.chunk(end), &name.text) | name.others != 0xffff {
                return None;
            }
            member.start = end + 1 - pos;
            end += name.size;
            // The colon, and the value after it.
            let text = source.chunk(end - 1);
            end += match text[1] {
                b'"' => match plain_end(text) {
                    end if text.get(end) == Some(&b'"') => end as u32,
                    _ => source.plain_string(end)?,
                },
                b'1'..=b'9' => digits(text),
                _ => literal(text)?,
            };
            member.end = end - pos;
        }
        if shape.len == 0 || source.chunk(end)[0] != b'}' {
            return None;
        }
        Some((end + 1, if shape.is_sorted { &[] } else { &shape.sorted[..shape.len] }))
    }

    /// Expects the next object of this depth to be like this one, whose values are scalars. `shift` is the difference
    /// between positions of members and those in the source.
    #[cold]
    #[inline(never)]
    pub(super) fn learn(
        &mut self, source: ChunkedText<'_>, depth: usize, members: &[JsonMember], shift: u32, is_sorted: bool,
    ) {
        if self.learned == MAX_LEARNED {
            return;
        }
        self.learned += 1;
        let shape = &mut self.shapes[depth % SHAPE_DEPTHS];
        shape.len = 0;
        let Some(sorted) = sort::order_few(members) else { return };
        for (name, member) in shape.names.iter_mut().zip(members) {
            let text = source.chunk((member.start + shift).wrapping_sub(1));
            let size = member.size + 2;
            if size > 16 || text[size as usize - 1] != b':' {
                return;
            }
            *name = ShapeName { text: *text, others: 0xffff & !0 << size, size };
        }
        (shape.sorted, shape.len, shape.is_sorted) = (sorted, members.len(), is_sorted);
    }
}
