// Where a waiting Node.js stands until its call is there; then it runs the program, and is gone.
//
// Run by pid 1 as `node gate.cjs CALL UP`, where each is the number of a descriptor:
//
//     UP    to pid 1: a byte when this is reached, so that a runtime that cannot start is known before its call is
//     CALL  from pid 1: the call, to the end of file, as texts that each end with NUL: the main file, the number of
//           arguments, the arguments, and `NAME=VALUE` for each variable that the call gave
//
// Both are closed, and nothing of this file can be reached, when the program's first line runs: it is started by Node's
// own entry for main files, which decides as for any file whether it is an ES module or CommonJS.
"use strict";

const fs = require("node:fs");
const Module = require("node:module");
const path = require("node:path");
const { compileFunction } = require("node:vm");

function readAll(fd) {
  const parts = [];
  const buffer = Buffer.alloc(65536);
  for (let size; (size = fs.readSync(fd, buffer)) > 0; ) parts.push(Buffer.from(buffer.subarray(0, size)));
  return Buffer.concat(parts).toString().split("\0").slice(0, -1);
}

const WRAPPER = ["exports", "require", "module", "__filename", "__dirname"];

function isCommonJs(file) {
  try {
    compileFunction(fs.readFileSync(file, "utf8"), WRAPPER, { filename: file });
    return true;
  } catch {
    return false;
  }
}

// People mix the two systems in one file. What a CommonJS file has, an ES module that is the program has too, as
// globals, which its own declarations of the same names hide.
function lendCommonJs(file) {
  const module = new Module(file, null);
  module.filename = file;
  module.paths = Module._nodeModulePaths(path.dirname(file));
  const require = Module.createRequire(file);
  require.main = module;
  const values = [module.exports, require, module, file, path.dirname(file)];
  WRAPPER.forEach((name, place) => {
    Object.defineProperty(globalThis, name, { value: values[place], writable: true, configurable: true });
  });
}

// A pipe that is full would else lose what is written right before `process.exit`, and be unwritable to children.
for (const stream of [process.stdout, process.stderr]) stream._handle?.setBlocking?.(true);

const [callFd, upFd] = process.argv.slice(2).map(Number);
fs.writeSync(upFd, "U");
fs.closeSync(upFd);
const [main, count, ...texts] = readAll(callFd);
fs.closeSync(callFd);
if (main === undefined) process.exit(1); // pid 1 has gone

process.execArgv = [];
process.argv = [process.execPath, main, ...texts.splice(0, Number(count))];
for (const text of texts) {
  const end = text.indexOf("=");
  process.env[text.slice(0, end)] = text.slice(end + 1);
}
// npm takes the nearest directory with one for the project: else that would be `/`, where snapshots are mounted.
fs.mkdirSync(path.join(path.dirname(main), "node_modules"));
if (!isCommonJs(main)) lendCommonJs(main);
delete require.cache[__filename];
for (const known of Object.keys(Module._pathCache)) delete Module._pathCache[known];
process.mainModule = undefined;
process.nextTick(Module.runMain, main); // so that no frame of this file is in the program's stack traces
