//! Runs the client's own scripts with Lua 5.1, as Redis does.

use std::{cell::RefCell, collections::HashMap};

use bytes::Bytes;
use mlua::{Error, Function, Lua, MultiValue, Table, Value, Variadic};

use super::{
    database::{CommandContext, RedisDatabase, command_name, write_flags},
    resp::ServerReply,
};

thread_local! {
    static LUA: LuaHost = LuaHost::new().expect("Lua starts");
    /// The script that runs on this thread.
    static RUNNING: RefCell<Option<RunningScript>> = const { RefCell::new(None) };
}

struct LuaHost {
    lua: Lua,
    compiled: RefCell<HashMap<Bytes, Function>>,
}

#[derive(Default)]
struct RunningScript {
    database: RedisDatabase,
    context: CommandContext,
    /// A full server refuses only the first write of a script.
    has_written: bool,
    /// The error of the command that ended the script.
    error: Option<String>,
}

/// Runs a script.
pub fn run_script(
    database: &mut RedisDatabase, context: &mut CommandContext, body: &Bytes, keys: &[Bytes], args: &[Bytes],
) -> ServerReply {
    let running = RunningScript {
        database: std::mem::take(database),
        context: std::mem::take(context),
        ..RunningScript::default()
    };
    RUNNING.set(Some(running));
    let result = LUA.with(|host| host.run(body, keys, args));
    let running = RUNNING.take().expect("it was set above");
    (*database, *context) = (running.database, running.context);
    match (result, running.error) {
        (Ok(reply), _) => reply,
        (Err(_), Some(error)) => ServerReply::Error(format!("{error} script: {}", body.len())),
        (Err(error), None) => {
            let error = error.to_string();
            ServerReply::Error(format!("ERR user_script: {}", error.lines().next().unwrap_or_default()))
        }
    }
}

impl LuaHost {
    fn new() -> mlua::Result<Self> {
        let lua = Lua::new();
        let redis = lua.create_table()?;
        redis.set("call", lua.create_function(|lua, args| call(lua, args, true))?)?;
        redis.set("pcall", lua.create_function(|lua, args| call(lua, args, false))?)?;
        let layout = lua.create_table()?;
        layout.set("pack", lua.create_function(pack)?)?;
        layout.set("unpack", lua.create_function(unpack)?)?;
        lua.globals().set("redis", redis)?;
        lua.globals().set("struct", layout)?;
        Ok(Self { lua, compiled: RefCell::default() })
    }

    fn run(&self, body: &Bytes, keys: &[Bytes], args: &[Bytes]) -> mlua::Result<ServerReply> {
        let table = |items: &[Bytes]| -> mlua::Result<Table> {
            let strings: mlua::Result<Vec<_>> = items.iter().map(|item| self.lua.create_string(item)).collect();
            self.lua.create_sequence_from(strings?)
        };
        self.lua.globals().set("KEYS", table(keys)?)?;
        self.lua.globals().set("ARGV", table(args)?)?;
        let known = self.compiled.borrow().get(body).cloned();
        let function = match known {
            Some(function) => function,
            None => {
                let function = self.lua.load(&body[..]).into_function()?;
                self.compiled.borrow_mut().insert(body.clone(), function.clone());
                function
            }
        };
        to_reply(&function.call(())?)
    }
}

/// `redis.call`, which raises errors, or `redis.pcall`, which returns them.
fn call(lua: &Lua, args: Variadic<Value>, raises: bool) -> mlua::Result<Value> {
    let args: mlua::Result<Vec<Bytes>> = args.iter().map(to_argument).collect();
    let args = args?;
    let reply = RUNNING.with_borrow_mut(|running| {
        let running = running.as_mut().expect("a script runs");
        let is_full = running.context.is_full;
        running.context.is_full &= !running.has_written;
        let reply = running.database.run(&mut running.context, &args);
        running.context.is_full = is_full;
        let reply = reply.unwrap_or_else(|| panic!("a script calls {:?}, which is not simulated", args[0]));
        match &reply {
            ServerReply::Error(error) if raises => running.error = Some(error.clone()),
            ServerReply::Error(_) => {}
            _ => running.has_written |= write_flags(&command_name(&args)).0,
        }
        reply
    });
    match reply {
        ServerReply::Error(error) if raises => Err(Error::RuntimeError(error)),
        reply => to_value(lua, &reply),
    }
}

fn to_argument(value: &Value) -> mlua::Result<Bytes> {
    match value {
        Value::String(text) => Ok(Bytes::copy_from_slice(&text.as_bytes())),
        Value::Integer(number) => Ok(number.to_string().into()),
        Value::Number(number) => Ok(number.to_string().into()),
        other => Err(Error::RuntimeError(format!("a command's argument is {other:?}"))),
    }
}

fn to_value(lua: &Lua, reply: &ServerReply) -> mlua::Result<Value> {
    let named = |name: &str, text: &str| {
        let table = lua.create_table()?;
        table.set(name, text)?;
        Ok(Value::Table(table))
    };
    match reply {
        ServerReply::Nil => Ok(Value::Boolean(false)),
        ServerReply::Int(number) => Ok(Value::Number(*number as f64)),
        ServerReply::Bytes(bytes) => lua.create_string(bytes).map(Value::String),
        ServerReply::Status(status) => named("ok", status),
        ServerReply::Error(error) => named("err", error),
        ServerReply::Array(parts) => {
            let parts: mlua::Result<Vec<_>> = parts.iter().map(|part| to_value(lua, part)).collect();
            lua.create_sequence_from(parts?).map(Value::Table)
        }
    }
}

fn to_reply(value: &Value) -> mlua::Result<ServerReply> {
    Ok(match value {
        Value::Boolean(true) => ServerReply::Int(1),
        Value::Integer(number) => ServerReply::Int(*number),
        // Redis drops what is behind the point.
        Value::Number(number) => ServerReply::Int(*number as i64),
        Value::String(text) => ServerReply::Bytes(Bytes::copy_from_slice(&text.as_bytes())),
        Value::Table(table) => {
            let parts: mlua::Result<Vec<_>> =
                table.sequence_values::<Value>().map(|part| part.and_then(|part| to_reply(&part))).collect();
            ServerReply::Array(parts?)
        }
        _ => ServerReply::Nil,
    })
}

/// One field of a layout.
enum LayoutField {
    /// So many bytes as they are: `c16`.
    Text(usize),
    /// An unsigned number of so many bytes: `B`, `I4`, `I8`.
    Number(usize),
}

/// Reads a layout of big-endian fields, such as `>Bc16I8`.
fn fields(layout: &str) -> impl Iterator<Item = LayoutField> {
    let rest = layout.strip_prefix('>').expect("only big-endian numbers are simulated");
    let starts: Vec<usize> = rest.char_indices().filter(|(_, c)| !c.is_ascii_digit()).map(|(at, _)| at).collect();
    let ends = starts.iter().skip(1).copied().chain([rest.len()]).collect::<Vec<_>>();
    let items: Vec<_> = starts.iter().zip(ends).map(|(start, end)| rest[*start..end].to_owned()).collect();
    items.into_iter().map(|item| match item.split_at(1) {
        ("B", "") => LayoutField::Number(1),
        ("I", size) => LayoutField::Number(size.parse().expect("a size")),
        ("c", size) => LayoutField::Text(size.parse().expect("a size")),
        _ => panic!("{item} is not simulated"),
    })
}

/// `struct.pack`.
fn pack(lua: &Lua, (layout, values): (String, Variadic<Value>)) -> mlua::Result<Value> {
    let mut packed = Vec::new();
    for (field, value) in fields(&layout).zip(values.iter()) {
        match (field, value) {
            (LayoutField::Text(size), Value::String(text)) => {
                let bytes = text.as_bytes();
                packed.extend_from_slice(
                    bytes.get(..size).ok_or_else(|| Error::RuntimeError("string too short".into()))?,
                );
            }
            (LayoutField::Number(size), value) => {
                let number = match value {
                    Value::Integer(number) => *number,
                    Value::Number(number) => *number as i64,
                    other => return Err(Error::RuntimeError(format!("{other:?} is no number"))),
                };
                packed.extend_from_slice(&number.to_be_bytes()[8 - size..]);
            }
            (LayoutField::Text(_), other) => return Err(Error::RuntimeError(format!("{other:?} is no string"))),
        }
    }
    lua.create_string(packed).map(Value::String)
}

/// `struct.unpack`: the values, and the index of the byte behind them.
fn unpack(lua: &Lua, (layout, text, from): (String, mlua::LuaString, Option<usize>)) -> mlua::Result<MultiValue> {
    let bytes = text.as_bytes();
    let mut at = from.unwrap_or(1) - 1;
    let mut values = Vec::new();
    for field in fields(&layout) {
        let (LayoutField::Text(size) | LayoutField::Number(size)) = field;
        let part = bytes.get(at..at + size).ok_or_else(|| Error::RuntimeError("data string too short".into()))?;
        at += size;
        values.push(match field {
            LayoutField::Text(_) => Value::String(lua.create_string(part)?),
            // Lua counts with doubles.
            LayoutField::Number(_) => {
                Value::Number(part.iter().fold(0, |n: u64, byte| n << 8 | u64::from(*byte)) as f64)
            }
        });
    }
    values.push(Value::Number((at + 1) as f64));
    Ok(values.into_iter().collect())
}
