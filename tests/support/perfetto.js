// Runs SQL queries on a trace in Perfetto's own engine, the WebAssembly build of its user interface.
//
//     node perfetto.js FOLDER TRACE SQL...      FOLDER holds engine_bundle.js and trace_processor*.wasm
//
// Prints a JSON list with a list of rows for each query. The engine is a web worker that uses TraceProcessorRpc
// (protos/perfetto/trace_processor/trace_processor.proto) through a message port. This script encodes and decodes the
// few messages that it needs.
'use strict';
const fs = require('fs');
const path = require('path');
const vm = require('vm');

const [folder, trace, ...queries] = process.argv.slice(2);
const node = process;
const APPEND = 1, FINALIZE = 2, QUERY = 3, CHUNK = 16 << 20;

function varint(number) {
  const bytes = [];
  for (let rest = BigInt(number); ; rest >>= 7n) {
    if (rest < 128n) return Buffer.from([...bytes, Number(rest)]);
    bytes.push(Number(rest & 127n) | 128);
  }
}

const field = (number, content) => Buffer.concat([varint(number * 8 + 2), varint(content.length), content]);

let sequence = 0;
function message(method, ...more) {
  const head = [varint(1 * 8), varint(sequence++), varint(2 * 8), varint(method)];
  return field(1, Buffer.concat([...head, ...more]));
}

function* read(bytes) {
  let place = 0;
  const number = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[place++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  while (place < bytes.length) {
    const key = Number(number());
    let value;
    if ((key & 7) === 0) value = number();
    else {
      const length = (key & 7) === 2 ? Number(number()) : (key & 7) === 1 ? 8 : 4;
      value = bytes.subarray(place, place + length);
      place += length;
    }
    yield [key >> 3, value];
  }
}

function* packed(bytes) {
  for (let place = 0; place < bytes.length;) {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[place++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) break;
    }
    yield BigInt.asIntN(64, value);
  }
}

// Types of cells: 1 null, 2 integer, 3 float, 4 text, 5 bytes. The values of each type are in a separate list.
function rows(results) {
  let width = 0;
  const cells = [];
  for (const result of results) {
    for (const [number, value] of read(result)) {
      if (number === 1) width += 1;
      if (number === 2) throw new Error(value.toString());
      if (number !== 3) continue;
      const batch = Object.fromEntries(read(value));
      const integers = packed(batch[2] ?? []);
      const texts = (batch[5] ?? Buffer.alloc(0)).toString().split('\0').values();
      let float = 0;
      for (const kind of packed(batch[1] ?? [])) {
        if (kind === 2n) cells.push(Number(integers.next().value));
        else if (kind === 3n) cells.push(batch[3].readDoubleLE(8 * float++));
        else cells.push(kind === 4n ? texts.next().value : null);
      }
    }
  }
  return width ? Array.from({length: cells.length / width}, (_, row) => cells.slice(row * width, (row + 1) * width)) : [];
}

// Globals that the bundle expects in a web worker.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = function () {};
globalThis.location = {href: 'http://localhost/engine_bundle.js', pathname: '/engine_bundle.js', search: ''};
globalThis.importScripts = () => {};
const file = (url) => fs.readFileSync(path.join(folder, path.basename(String(url))));
globalThis.fetch = async (url) => new Response(file(url), {headers: {'content-type': 'application/wasm'}});
globalThis.XMLHttpRequest = class {
  open(_, url) { this.url = url; }
  send() {
    const bytes = file(this.url);
    this.status = 200;
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length);
    this.onload?.();
  }
};
// Hide `process`, so that the bundle does not detect node.
Object.defineProperty(globalThis, 'process', {value: undefined, configurable: true, writable: true});

const found = [];
const port = {
  postMessage(data) {
    for (const [, text] of read(Buffer.from(data))) {
      for (const [key, value] of read(text)) {
        if (key === 5) throw new Error(value.toString());
        if (key === 201 || key === 212) {
          const error = [...read(value)].find(([inner]) => inner === (key === 201 ? 2 : 1));
          if (error && error[1].length) throw new Error(error[1].toString());
        }
        if (key === 203) found.push(value);
      }
    }
  },
};

(async () => {
  vm.runInThisContext(file('engine_bundle.js').toString(), {filename: 'engine_bundle.js'});
  globalThis.onmessage({data: port});
  // Wait, because the worker fails on messages that arrive before its engine is ready, and does not report when it is.
  await new Promise((done) => setTimeout(done, Number(node.env.PERFETTO_WAIT_MS ?? 2000)));
  const send = async (bytes) => {
    port.onmessage({data: new Uint8Array(bytes)});
    await new Promise((done) => setImmediate(done));
  };
  const content = fs.openSync(trace, 'r');
  const chunk = Buffer.alloc(CHUNK);
  for (let size; (size = fs.readSync(content, chunk, 0, CHUNK)) > 0;) {
    await send(message(APPEND, field(101, chunk.subarray(0, size))));
  }
  await send(message(FINALIZE));
  const all = [];
  for (const query of queries) {
    found.length = 0;
    await send(message(QUERY, field(103, field(1, Buffer.from(query)))));
    all.push(rows(found));
  }
  fs.writeSync(1, JSON.stringify(all));
  node.exit(0);
})().catch((error) => {
  fs.writeSync(2, `${error.message}\n`);
  node.exit(1);
});
